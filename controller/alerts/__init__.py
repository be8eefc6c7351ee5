"""Tells people what happens in a run, through the services that apprise knows.

Nothing here runs unless `alerts:` names an address. Apprise is imported only in the processes
that send (`send.py`), which is why this file imports nothing: they start with it.
"""
