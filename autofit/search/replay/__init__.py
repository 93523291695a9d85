"""Replays search methods over recorded tables as if the trials ran: ours and others', judged alike."""
