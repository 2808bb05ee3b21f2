"""A development CA with certificates and tokens for all services. Needs the extra `certs`."""
