"""Answers that must follow a grammar: a JSON schema, or the calls of tools.

`library` alone knows the grammar library; `constraints` holds the grammars of running requests beside the engine.
"""
