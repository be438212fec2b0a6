"""What a dataset holds: figures (`stats`), the terminal view of them (`terminal`), and a dataset card (`card`)."""
