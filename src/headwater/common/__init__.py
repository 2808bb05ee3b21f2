"""Protocol of the common area, generated from protos/."""
