"""What is done before it is needed: payloads come to the node's folder, for requests that wait for their turn
and for sessions of which a client says that they go on."""
