"""An HTTP server that speaks OpenAI's protocol, on anything that answers requests."""
