"""Writers: who writes here, and what is known of those who have written."""
