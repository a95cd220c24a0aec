"""The workers of several hosts behind one executor: the first node brings them every record, others run them.

Annex: plugs in at EXECUTORS.
May import: compilation.packaged, config, distributed, executor, executor.records, kv_transfer.
Door: `HeadNode` in head.py, `NodeAgent` in agent.py.
"""
