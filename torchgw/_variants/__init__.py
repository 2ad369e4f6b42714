"""Plans of low rank, barycenters and embeddings, made with :func:`torchgw.solve`."""
