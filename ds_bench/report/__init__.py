"""Output for the user: tables, Markdown, the HTML page, charts and exported configurations."""
