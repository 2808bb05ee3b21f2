"""The `headwater` command. Nothing here imports torch, and parsing imports nothing heavy at all."""
