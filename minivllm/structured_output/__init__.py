"""Output that keeps to a JSON schema, a regular expression, a list of choices or a grammar."""
