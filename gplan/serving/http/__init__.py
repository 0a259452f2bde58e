"""The OpenAI HTTP API over an engine client."""
