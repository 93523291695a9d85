"""What the API says of itself: documents that it answers with, and an example of each."""
