"""gRPC plumbing shared by all services: servers, channels, and the mapping between our errors and gRPC status."""
