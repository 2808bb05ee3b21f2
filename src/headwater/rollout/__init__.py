"""Protocol of the rollout area, generated from protos/."""
