"""The built-in rewards, one file each."""
