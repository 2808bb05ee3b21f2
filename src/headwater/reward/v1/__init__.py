"""Protocol of the reward area, generated from protos/."""
