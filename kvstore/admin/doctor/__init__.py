"""Verbs that check and print a configuration: doctor, vllm-config."""
