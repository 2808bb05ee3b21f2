"""The router: the front door of Headwater. It admits prompts, hands each to a worker, and streams the results back."""
