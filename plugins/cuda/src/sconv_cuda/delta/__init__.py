"""The gated delta rule on a GPU: verify from one read of the state, commit from records."""
