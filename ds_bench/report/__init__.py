"""What the user sees and keeps: tables, Markdown, HTML page, charts, exported configurations."""
