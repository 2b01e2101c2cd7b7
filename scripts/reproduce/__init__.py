"""What ``python scripts/reproduce NAME`` is made of: one file a table or figure, over what they share."""
