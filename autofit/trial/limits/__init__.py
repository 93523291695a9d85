"""What a trial may take of its machine, and what it must not leave behind."""
