"""The cross entropy of MindSpore's tutorial, expanded into small operators."""

from mindspore import nn, ops


class SoftmaxCrossEntropyExpand(nn.Cell):
    """Return the mean of -log(softmax(scores)) at the labels, for scores of shape (N, C).

    With `sparse`, the labels (N,) are class numbers. Without it, each label is a row of C probabilities. The result
    equals nn.CrossEntropyLoss, but the graph has small operators, which can be placed on devices separately.
    """

    def __init__(self, sparse=False):
        super().__init__()
        self.sparse = sparse

    def construct(self, scores, labels):
        shifted = scores - scores.max(-1, keepdims=True)  # its exp is at most 1
        exponentials = ops.exp(shifted)
        if self.sparse:
            labels = ops.one_hot(labels, scores.shape[-1]).astype(scores.dtype)
        # Compute log(softmax) without the softmax, because the softmax can be 0.
        log_softmax = shifted - ops.log(exponentials.sum(-1, keepdims=True))
        return -(labels * log_softmax).sum(-1).mean()
