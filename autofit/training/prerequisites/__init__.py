"""What training a config requires of the machine beside packages."""
