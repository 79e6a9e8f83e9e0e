"""Who is there: the DHT node of a rank, identities, join links and the records that clusters sign."""
