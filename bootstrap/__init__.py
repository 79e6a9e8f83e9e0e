"""The organiser's program: dilocox-bootstrap. It signs a run spec and holds the swarm's entry point."""
