"""What a trial's child does: build the step, check it, time it, and read its memory."""
