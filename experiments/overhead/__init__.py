"""What the training step and the policies cost."""
