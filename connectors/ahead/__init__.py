"""What is done for requests that wait for their turn: payloads come to the node's folder meanwhile."""
