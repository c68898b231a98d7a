"""Networks by layerwise SPFB and by its peers, tuned alike: steps and seconds to the loss at which AdamW ends."""
