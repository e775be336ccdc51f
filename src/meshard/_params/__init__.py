"""Parameters at rest and in use."""
