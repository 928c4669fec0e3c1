"""The job behind the interfaces of other libraries, each of which is imported by the module of its name."""
