"""A folder for MindFormers' `REGISTER_PATH`."""
