"""From records to numbers: throughput, MFU, stability, peaks."""
