"""Speculation: drafts of the next tokens, their verification and acceptance in one step."""
