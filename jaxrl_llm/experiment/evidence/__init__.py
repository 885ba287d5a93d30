"""What a record rests on: verdicts, beds, pilots, stored seeds, provenance, committed records and their pages."""
