"""Steps of automatic optimization come in; steps that run in parts where memory runs out go out."""
