"""Search methods replayed over recorded tables: ours and others', judged alike. Not on a search's path."""
