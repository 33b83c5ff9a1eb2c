"""The loop of each stage: it receives records, hands them to the logic of `pipeline`, and sends what comes out."""
