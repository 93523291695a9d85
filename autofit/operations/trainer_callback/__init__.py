"""`autofit.TrainerCallback`, and what it knows, says and stores of an ordinary run of a Trainer."""
