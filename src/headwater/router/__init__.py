"""Protocol of the router area, generated from protos/."""
