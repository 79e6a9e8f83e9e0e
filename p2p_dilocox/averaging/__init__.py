"""Between clusters: the rounds in which one stage's
pseudo-gradients are averaged, the same bytes on every cluster."""
