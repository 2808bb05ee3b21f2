"""Protocol of the trainer area, generated from protos/."""
