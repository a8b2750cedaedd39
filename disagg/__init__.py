"""disagg: large language models served with prefill and decode on separate workers, on Ray."""
