"""The recipe of the bundled model: data, seeded circuits, training, export."""
