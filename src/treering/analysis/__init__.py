"""What `treering inspect` computes: reuse between epochs, recordings, and replays of a drafter over them."""
