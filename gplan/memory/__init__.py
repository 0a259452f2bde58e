"""Device memory by purpose: the ledger, the KV pool and the host's page table."""
