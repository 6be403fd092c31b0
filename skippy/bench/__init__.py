"""The benchmark that `skippy bench` runs: what reuse saves, beside what one would use instead."""
