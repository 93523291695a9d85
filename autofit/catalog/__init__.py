"""What is known before anything runs: model architectures and accelerators, as data files."""
