"""HTTP server with OpenAI's API, on top of any service that answers requests."""
