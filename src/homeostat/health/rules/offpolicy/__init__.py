"""Rules of the family offpolicy."""
