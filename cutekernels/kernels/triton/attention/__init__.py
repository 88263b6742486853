"""Row-wise passes around attention."""
