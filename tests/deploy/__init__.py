"""What deploy/ holds, run by the tools it is written for: rendered, checked, scraped, balanced."""
